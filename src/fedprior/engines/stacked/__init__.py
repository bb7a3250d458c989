"""All clients of a cohort, and even several runs, in one computation."""
