"""What an option is: strict models of sections, the types of fields, and how a document becomes a model."""
