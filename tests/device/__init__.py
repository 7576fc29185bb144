"""What must hold on the device at hand, whatever MLX runs on."""
