"""Rules for operators of other libraries: as they are declared, found in plugins, and shipped."""
