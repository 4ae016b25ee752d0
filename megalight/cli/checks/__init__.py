"""What is wrong with a command, found before torch is imported."""
