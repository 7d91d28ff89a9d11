"""Near copies: values of other hosts in an arena of this one, for namespaces whose values never change."""
