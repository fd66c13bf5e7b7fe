"""The ways to train without autopar that `autopar bench` runs."""
