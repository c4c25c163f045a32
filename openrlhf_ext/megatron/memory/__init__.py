"""What leaves the device and comes back."""
