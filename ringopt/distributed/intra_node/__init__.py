"""Messages and collectives between ranks of one node that read each other's memory."""
