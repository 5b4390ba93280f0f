"""The trainer side: rewrite, session, readers, models, trainer."""
