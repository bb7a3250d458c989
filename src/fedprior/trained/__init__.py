"""What a trained network is used for: make it small, export it, evaluate it, predict."""
