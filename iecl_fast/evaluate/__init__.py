"""What frozen features are worth: weighted kNN and a linear probe."""
