"""Starting ranks on this host, and joining a launcher."""
