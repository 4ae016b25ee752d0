"""What data modules over token files share."""
