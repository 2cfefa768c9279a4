"""Data sheets of devices and links, measured rates, and the profile of this machine."""
