"""Files: extended XYZ, predictions, tensors; written completely or not at all."""
