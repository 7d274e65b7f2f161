"""Who is here, what they hold, who works for whom, and which node shall hold which slice. Pure."""
