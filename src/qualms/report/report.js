"use strict";
// Shows the map; rows of the tables of worst predictions select structures in it.
(async () => {
  const message = document.getElementById("map-message");
  const show = (text) => { message.textContent = text; };
  try {
    const data = JSON.parse(document.getElementById("map-data").textContent);
    const warnings = new Chemiscope.Warnings();
    warnings.addHandler((text) => show(String(text)));
    const config = { meta: "map-meta", map: "map-plane", structure: "map-structure", info: "map-info" };
    const viewer = await Chemiscope.DefaultVisualizer.load(config, data, warnings);
    window.qualmsMap = viewer;
    // Elements have their usual colours, as in the structures; the viewer would use its palette.
    const elements = JSON.parse(document.getElementById("map-plane").dataset.elementColors);
    const options = viewer.map._options;
    if (elements.length && options && options.colorScale) {
      const palette = options.colorScale.bind(options);
      options.colorScale = () => (options.color.property.value === "element" ? elements : palette());
      options.color.property.onchange.unshift((name) => {
        if (name === "element") options.color.mode.value = "linear";
      });
    }
    for (const button of document.querySelectorAll("button[data-structure]")) {
      button.addEventListener("click", () => {
        const structure = Number(button.dataset.structure);
        const indexes = button.dataset.atom === undefined
          ? viewer.indexer.fromStructure(structure, "structure")
          : viewer.indexer.fromStructureAtom("atom", structure, Number(button.dataset.atom));
        if (indexes) {
          viewer.select(indexes);
          document.getElementById("map").scrollIntoView({ block: "start" });
        }
      });
    }
    document.documentElement.dataset.map = "ready";
  } catch (error) {
    show(`The map cannot be shown: ${error.message || error}. It needs a browser with WebGL.`);
    document.querySelector(".map").style.display = "none";
    for (const button of document.querySelectorAll("button[data-structure]")) button.disabled = true;
    document.documentElement.dataset.map = "failed";
  }
})();
