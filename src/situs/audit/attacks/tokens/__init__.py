"""The attack on tokens: what entered the first block, from the row spaces of its gradients."""
