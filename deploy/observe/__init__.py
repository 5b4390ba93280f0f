"""What an operator looks at: screens, views and inspections of a running cluster."""
