"""The foundations: trees, keys, networks, optimisers, clients' data, files. Nothing here knows about priors."""
