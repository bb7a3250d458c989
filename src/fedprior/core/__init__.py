"""What everything stands on: trees, keys, networks, optimisers, clients' data, files. Nothing here knows a prior."""
