"""Features of atomic environments and their derivatives."""
