"""All clients of a cohort, and several runs, in one computation."""
