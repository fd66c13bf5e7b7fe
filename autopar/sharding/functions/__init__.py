"""Rules of operations whose text depends on shapes."""
