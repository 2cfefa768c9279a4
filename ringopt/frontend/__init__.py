"""From Dynamo's graph or an ExportedProgram to one flat functional ATen graph."""
