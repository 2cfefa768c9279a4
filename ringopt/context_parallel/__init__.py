"""Attention over sequence shards: geometry (who sees whom), plans (who sends what when), and the executor."""
