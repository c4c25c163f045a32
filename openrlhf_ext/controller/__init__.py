"""OpenRLHF's single controller with our Ray actors: placement, experience maker, trainer, lifetime of the job."""
