"""Programs that run in a contender's own environment: each is one file that imports nothing of polynya."""
