"""`research.ablate`: learned routing against chance, at equal steps, data and initial weights."""
