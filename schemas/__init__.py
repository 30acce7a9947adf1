"""The formats of eaglehs as typed, versioned records. Standard library only: the part inside SGLang imports this."""
