"""What `ringopt bench gpu` checks and times on one device, and on several."""
