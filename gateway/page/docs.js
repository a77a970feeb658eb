// Shows /openapi.json by Swagger UI, which the gateway serves itself.
SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#docs",
  deepLinking: true,
  docExpansion: "list",
  defaultModelsExpandDepth: 0,
  persistAuthorization: true,
  validatorUrl: null,
});
