"""What an exchange costs, as formulas."""
