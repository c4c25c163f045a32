"""What changes a decoder's layers, whoever's they are: converters, which a model's settings carry."""
