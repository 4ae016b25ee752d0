"""Lightning plugins, and one folder for each optional package."""
