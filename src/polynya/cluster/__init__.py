"""Where nodes run. One machine needs nothing of it: the server holds a node in its own process. ``ray`` places nodes on many machines."""
