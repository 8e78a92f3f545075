// Search of pages that are opened as files. Browsers start no worker there, so its script runs in a hidden frame.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.documentElement.append(this.frame);
      const page = this.frame.contentDocument;
      page.open();
      page.write(`<script src="${url}"></script>`);
      page.close();

      const worker = this.frame.contentWindow;
      worker.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.loaded = new Promise((resolve) => worker.addEventListener("load", resolve));
    }

    postMessage(data) {
      const worker = this.frame.contentWindow;
      this.loaded.then(() => worker.dispatchEvent(new worker.MessageEvent("message", { data })));
    }
  };
  window.Worker = window.IFrameWorker;
}
