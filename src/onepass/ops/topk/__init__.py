"""The k largest scores of each row, with gates that train; see README.md in this folder."""
