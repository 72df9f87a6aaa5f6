"""The model's side: log probabilities and gradients, the samplers, ranks, loading."""
