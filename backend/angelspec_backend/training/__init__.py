"""Training of drafters: data, target features, objectives, the training loop."""
