"""What measurements stand on: peers, links of known speed, timing, memory of tensors."""
