"""Rules of operations whose letters depend on shapes and arguments: products, shapes (rearranged elements), views."""
