"""Who may do what: roles, tokens, TLS, and what is signed."""
