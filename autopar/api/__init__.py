"""All that a user calls, and the only room where stages meet."""
