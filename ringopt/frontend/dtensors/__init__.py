"""DTensors in a program (tensor parallelism beside the sequence): each as the local tensor that a rank has of it."""
