"""Rules of operations whose letters depend on shapes and arguments.

Read products, shapes (rearranged elements), views, pixels (feature maps whose height and width are split).
"""
