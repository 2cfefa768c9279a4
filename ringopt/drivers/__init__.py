"""From a graph to its sharded form: for torch.compile, for conversion of an ExportedProgram, and as a dry run."""
