"""What runs in a clone of the repository: the demo, storms over the examples, and studies that the manual quotes."""
