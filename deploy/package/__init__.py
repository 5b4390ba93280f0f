"""What makes a release of a checkout; it imports nothing of the product."""
