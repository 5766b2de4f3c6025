"""Training of drafters: data, masks, losses, optimisers."""
