"""What has a name: algorithms, tasks, models and data."""
