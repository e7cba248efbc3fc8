"""MCP server through which an agent operates `paceline adapt`, within the folders and gates given at its start."""
