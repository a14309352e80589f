"""What do ranks that share the experts of a layer exchange? Process groups by name, agreement, rows, ordered sums."""
