"""The screens, views and inspections through which an operator sees a running cluster."""
