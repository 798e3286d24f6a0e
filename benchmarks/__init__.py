"""Measurements of this project: bars, cases of modules, a script per question; results/ holds what came out."""
