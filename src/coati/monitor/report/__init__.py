"""What a run left in its folder, for people: a table, a page with pictures, and a trace for Perfetto."""
